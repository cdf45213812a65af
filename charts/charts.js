// What reports draw with: nothing of Apache ECharts that they do not use. The page finds it as `window.echarts`.
import { init, use } from "echarts/core";
import { BarChart, CustomChart, SankeyChart, TreemapChart } from "echarts/charts";
import { GridComponent, TooltipComponent } from "echarts/components";
import { CanvasRenderer } from "echarts/renderers";

use([BarChart, CustomChart, SankeyChart, TreemapChart, GridComponent, TooltipComponent, CanvasRenderer]);
window.echarts = { init };
